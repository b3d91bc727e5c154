"""What bough's processes and their clients say to one another: plain values, and their way into protobuf and back."""
