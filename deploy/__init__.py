"""bough under Ray Serve: each replica of a deployment supervises one of bough's own programs. Ray is used only here.

No token goes through Serve but those of HTTP requests that come in by its proxy: a replica's program serves its own
gRPC port and announces it in the index, as it would had somebody started it by hand.
"""
