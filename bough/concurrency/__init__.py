"""Tasks and futures of asyncio, as all services use them."""
