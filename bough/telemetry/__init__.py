"""What a process tells of single requests: its log, and traces. Figures of all together are `bough.telemetry.metrics`."""
