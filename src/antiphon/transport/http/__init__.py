"""HTTP/1.1 on raw asyncio protocols: the edge that the router, the simulated engine and admin pages share."""
