#!/bin/bash
# What this GPU does: kernels, decode steps and served runs of the Llama-3-8B shape, transformers beside them. Results go
# to the folder given (default docs/benchmarks/gpu/DATE-DEVICE-COMMIT), as tables and JSON lines. Under 8 minutes on an H200.
# Nothing here has run on a GPU yet. REHEARSE=1 goes through the same commands at toy sizes on a CPU.
set -uo pipefail
python=${PYTHON:-python3}
model=models/configs/llama-3.1-8b at_once=64 requests=256 prompt=512 output=128 batches="1 16 64" context=4096
kernels=(kernels.gpu.bench) provider=triton
if [ "${REHEARSE:-}" ]; then
	model=models/configs/llama-125m at_once=2 requests=4 prompt=32 output=4 batches="1 2" context=32
	kernels+=(--rehearse)
	device=rehearsal provider=cpu
	export TRITON_INTERPRET=1
else
	device=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())') || exit 1
fi
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
out=${1:-docs/benchmarks/gpu/$(date -u +%F)-$device-$commit}
mkdir -p "$out"
failed=0

stage() { # name, seconds, command ...
	local name=$1 limit=$2
	shift 2
	echo "== $name: $*"
	timeout "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err" || { echo "!!! $name failed ($?)"; tail -5 "$out/$name.err"; failed=1; }
	[ -s "$out/$name.err" ] || rm -f "$out/$name.err"
	grep -v '^{' "$out/$name.txt"
}

library=()
[ "${FA3_LIBRARY:-}" ] && library=(--attention-library "$FA3_LIBRARY")
step=(-m engine.bench --model "$model" --batches $batches --context "$context")
serve=(-m loadtest.throughput --model "$model" --at-once "$at_once" --requests "$requests" --prompt-tokens "$prompt"
	--output-tokens "$output" --max-num-batched-tokens 8192)
stage kernels 150 "$python" -m "${kernels[@]}" "${library[@]}"
unset TRITON_INTERPRET
stage step-triton 60 "$python" "${step[@]}" --attention-backend "$provider"
[ "${FA3_LIBRARY:-}" ] && [ -z "${REHEARSE:-}" ] &&
	stage step-fa3 60 "$python" "${step[@]}" --attention-backend fa3 "${library[@]}"
stage step-deterministic 60 "$python" "${step[@]}" --deterministic
[ -z "${REHEARSE:-}" ] && stage step-fp8 60 "$python" "${step[@]}" --attention-backend triton --kv-cache-dtype fp8_e4m3
stage served 90 "$python" "${serve[@]}" "${library[@]}"
stage served-deterministic 90 "$python" "${serve[@]}" --deterministic true
stage transformers 90 "$python" tools/gpu/transformers_batching.py --model "$model" --requests "$requests" \
	--prompt-tokens "$prompt" --output-tokens "$output"
echo "results in $out"
exit $failed
