"""/v1/responses: its fields, the conversion of a conversation's items to a request, and of events to items."""
