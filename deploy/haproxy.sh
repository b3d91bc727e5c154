#!/bin/sh
# Runs the HAProxy $BOUGH_HAPROXY for Ray so that it ends with the process of Ray that starts it, even where that is killed:
# Ray's own outlives its node and holds the ports.
exec "$BOUGH_PYTHON" -P -m bough.processes.exit_with_parent "$PPID" "$BOUGH_HAPROXY" "$@"
