"""bough under Ray Serve: each replica of a deployment supervises one of bough's own programs. Ray is used only here.

Only HTTP requests that come in by Serve's proxy pass through Serve: a program serves its own gRPC port and announces
it in the index, as one started by hand does.
"""
