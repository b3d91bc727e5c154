"""Load tests by locust: users over gRPC and over HTTP, exact percentiles, one JSON line.

`python -m loadtest.locust` starts everything; `locustfile.py` is what locust itself loads. Modules that locust's users
need import no asyncio client of bough's: gevent runs them.
"""
