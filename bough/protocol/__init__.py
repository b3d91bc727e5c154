"""Messages between bough's processes and clients as plain values, and their conversion to and from protobuf."""
