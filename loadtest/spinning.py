"""What two processes that compute on the same processors cost each other, by how long OpenMP's threads spin.

    python -m loadtest.spinning

Each process multiplies 64 rows by matrices of the demonstration model's size with two threads, alone and then two
processes at once. A spin count of "default" is libgomp's own. Ends with one JSON line: milliseconds for a product.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

MULTIPLY = "multiply"
NUM_MATRICES = 30
ROWS, INPUTS, OUTPUTS = 64, 576, 1536


def multiply(seconds: float) -> float:
    """Milliseconds for a product and the function behind it, over so many seconds."""
    import torch  # here: it reads GOMP_SPINCOUNT, which is another for every process

    torch.set_num_threads(2)
    rows = torch.randn(ROWS, INPUTS, dtype=torch.bfloat16)
    matrices = [torch.randn(OUTPUTS, INPUTS, dtype=torch.bfloat16) for _ in range(NUM_MATRICES)]
    num_products, began = -NUM_MATRICES, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or num_products <= 0:
        for matrix in matrices:
            torch.nn.functional.silu(torch.nn.functional.linear(rows, matrix))
        num_products += NUM_MATRICES
        if num_products == 0:
            began = time.perf_counter()  # the first round does not count
    return elapsed / num_products * 1e3


def measured(spin_count: str, num_processes: int, seconds: float) -> float:
    """The mean over processes that run at once."""
    environ = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if spin_count != "default":
        environ["GOMP_SPINCOUNT"] = spin_count
    command = [sys.executable, __file__, MULTIPLY, str(seconds)]  # not -m: importing the package would set the count
    processes = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)
    ]
    return sum(float(process.communicate()[0]) for process in processes) / num_processes


def main() -> None:
    """Prints a line for each spin count, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spin-counts", nargs="+", default=["default", "100", "1000", "10000"])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each process")
    arguments = parser.parse_args()
    figures = {}
    for spin_count in arguments.spin_counts:
        alone, beside = (round(measured(spin_count, num, arguments.seconds), 3) for num in (1, 2))
        figures[spin_count] = {"alone_ms": alone, "beside_another_ms": beside}
        print(f"{spin_count:>10}: {alone} ms alone, {beside} ms beside another", file=sys.stderr, flush=True)
    print(json.dumps({"cores": os.cpu_count(), "milliseconds_for_a_product": figures}))


if __name__ == "__main__":
    if sys.argv[1:2] == [MULTIPLY]:
        print(multiply(float(sys.argv[2])))
    else:
        main()
