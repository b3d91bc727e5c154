#!/usr/bin/env bash
# Collects what the GPU check needs on a machine with a GPU but no network, and prints the commands to run there.
#
#   loadtest/gpu/carry.sh [FOLDER]
#
# That machine has Python 3.12 with torch 2.11 for CUDA 13, Triton 3.6, transformers 5.17, accelerate and numba. The
# other packages go to a new FOLDER (`.carried`) as wheels, in the versions of `.venv`. The demonstration's model, of
# 94 MB, is not among them: the part `pipeline` is skipped without it.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.carried}
[ ! -e "$folder" ] || { echo "error: FOLDER must not exist, got $folder" >&2; exit 2; }
names=(annotated-types greenlet protobuf pydantic pydantic-core simpy typing-inspection)

versions='import sys; from importlib.metadata import version; print(*(f"{n}=={version(n)}" for n in sys.argv[1:]))'
read -ra wanted <<<"$(.venv/bin/python -c "$versions" "${names[@]}")"
platforms=(--platform manylinux2014_x86_64)
for minor in {17..39}; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done # pip takes each name literally
.venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --dest "$folder" "${wanted[@]}"

cat <<COMMANDS
$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sh "$folder" | cut -f1). Copy this folder, with $folder, to that machine and run there:

python3 -m pip install --quiet --no-index --no-deps --target /tmp/carried $folder/*.whl
export PYTHONPATH=/tmp/carried
python3 -m loadtest.gpu --host-memory 60GB --seconds 290 --report first.json \\
    --parts "device,smoke,products,layer_bits,equality,families,draft,target 4,target 4 resident,profile"
python3 -m loadtest.gpu --host-memory 60GB --seconds 290 --report second.json \\
    --parts "attention,unpacking,recurrence,copying,contexts,experts,second_gpu,pipeline,target 16"
COMMANDS
