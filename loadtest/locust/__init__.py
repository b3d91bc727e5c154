"""Load tests with locust: users over gRPC and over HTTP, exact percentiles, one JSON line.

`python -m loadtest.locust` starts everything; locust itself runs `locustfile.py`. Modules that locust's users import
do not import bough's asyncio client, because the users run under gevent.
"""
