#!/usr/bin/env bash
# Measures what only a GPU can tell, on an H100 or H200 that is lent for minutes.
#
#     bash benchmarks/lease.sh [PART ...]    train, align, memory, generate, vit-l: by worth, and all if none is named
#
#     OUT     where the tables and numbers of a part go when it ends, as PART.md, beside log.txt (build/lease)
#     LIMIT   seconds for everything (570)
#     PYTHON  the interpreter (.venv's, or python3); libraries that it lacks are installed from WHEELS (build/wheels)
#     PEER    a checkout of github.com/beichenzbc/Long-CLIP, whose step is measured too (build/long-clip)
#     TINY=1  tries this script on a CPU, with small models
set -u # not -e: a part that fails stops no other
cd "$(dirname "$0")/.." || exit
PARTS=${*:-train align memory generate vit-l} OUT=${OUT:-build/lease} LIMIT=${LIMIT:-570}
WHEELS=${WHEELS:-build/wheels} PEER=${PEER:-build/long-clip}
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python} || PYTHON=${PYTHON:-python3}

base="ViT-B-16-quickgelu --batch 256" large="ViT-L-14-quickgelu --batch 96" rounds="--repeats 5" steps="--steps 12"
if [ "${TINY:-}" ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
    base="ViT-S-32 --batch 4" large="ViT-S-32 --batch 3" rounds="--repeats 1" steps="--steps 2"
fi
training="--precision bf16 --compile $rounds"
[ -e "$PEER/model/model_longclip.py" ] && training+=" --peer $PEER"

# The four folders under one import name and with a version, as when installed. The scripts write beside themselves.
tree=$(mktemp -d) && trap 'rm -rf "$tree"' EXIT
mkdir -p "$OUT" "$tree"/{benchmarks,debias_diffusion{,.dist-info}} && cp benchmarks/*.py "$tree/benchmarks"
ln -s "$PWD"/debias_diffusion/* "$PWD"/{pipelines,eval,app} "$tree/debias_diffusion"
sed -nE 's/^(n|v)(ame|ersion) = "(.*)"/\1\2: \3/p' pyproject.toml >"$tree/debias_diffusion.dist-info/METADATA"
export PYTHONPATH=$tree${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TQDM_MININTERVAL=10 # logs are short, and complete

part() { # NAME LIMIT SCRIPT [OPTION ...]: runs a part that is asked for; what it published goes to $OUT/NAME.md
    local name=$1 limit=$2 started=$SECONDS ended file
    [[ " $PARTS " == *" $name "* ]] || return
    limit=$((LIMIT - SECONDS < limit ? LIMIT - SECONDS : limit))
    ((limit < 20)) && echo "== $name: no time left" && return
    echo "== $name: ${*:3} (at most $limit s)"
    timeout --kill-after=5 "$limit" "$PYTHON" "$tree/benchmarks/$3" "${@:4}"
    ended="== $name: $((SECONDS - started)) s, exit code $?" # 124: out of time
    printf '%s, of %s\n\n' "$ended" "${*:3}" >"$OUT/$name.md"
    for file in $(compgen -G "$tree/benchmarks/results/*.md"); do
        printf '%s\n\n```json\n%s\n```\n' "$(<"$file")" "$(<"${file%md}json")" >>"$OUT/$name.md"
    done
    rm -rf "$tree/benchmarks/results" && echo "$ended"
}

measure() {
    date -u; git rev-parse --short HEAD; nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    compgen -G "$WHEELS/*.whl" && "$PYTHON" -m pip install -q --no-index --no-deps --target "$tree" "$WHEELS"/*.whl
    "$PYTHON" -c 'import importlib.metadata, torch; print(torch.cuda.is_available() and torch.cuda.get_device_name())
for name in ("torch", "transformers", "diffusers", "open_clip_torch", "timm", "torchmetrics", "torch-fidelity"):
    print(name, next((found.version for found in importlib.metadata.distributions(name=name)), "IS MISSING"))'
    part train 240 train_step.py --model $base $training # 33 s of these compile on an H100, and 48 s of vit-l's
    part align 120 align.py --measured $rounds
    part memory 80 sdxl_memory.py --measured
    part generate 120 generate.py --timed --stock-encoders --positions 77 227 527 $steps $rounds
    part vit-l 240 train_step.py --model $large $training
    echo "== all: $SECONDS s"
}
measure 2>&1 | tee -a "$OUT/log.txt"
