"""/v1/responses: its fields, from the items of a conversation to a request, and from events to items."""
