#!/bin/bash
# Measures this GPU: kernels, decode steps and served runs of the Llama-3-8B shape, compared with transformers. Results
# go to the given folder (default docs/benchmarks/gpu/DATE-DEVICE-COMMIT): results.txt for people, results.jsonl, and
# errors.txt with the output to stderr. The most important stages run first, and all end within SECONDS_LIMIT (440)
# seconds. REHEARSE=1 runs the same commands, except those for FlashAttention-3 and fp8, at toy sizes on a CPU, without
# limits.
set -uo pipefail
python=${PYTHON:-python3}
model=models/configs/llama-3.1-8b at_once=64 requests=256 prompt=512 output=128 batches="1 16 64" context=4096
kernels=(bench.gpu_kernels) provider=triton seconds=${SECONDS_LIMIT:-440}
if [ "${REHEARSE:-}" ]; then
	model=models/configs/llama-125m at_once=2 requests=4 prompt=32 output=4 batches="1 2" context=32
	kernels+=(--rehearse)
	device=rehearsal provider=cpu seconds=100000
else
	device=$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())') || exit 1
fi
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
out=${1:-docs/benchmarks/gpu/$(date -u +%F)-$device-$commit}
mkdir -p "$out"
: >"$out/results.txt" >"$out/results.jsonl" >"$out/errors.txt"
failed=0

say() { echo "$*" | tee -a "$out/results.txt"; }

stage() { # name, seconds, command ...
	local name=$1 limit=$2 left=$((seconds - SECONDS)) start=$SECONDS status
	shift 2
	say "== $name: $*"
	if [ "${REHEARSE:-}" ] || [ "$limit" -gt "$left" ]; then limit=$left; fi
	if [ "$limit" -lt 10 ]; then say "!!! $name: no time left" && failed=1 && return; fi
	echo "== $name" >>"$out/errors.txt"
	# SIGINT, so that the services end; results printed so far are kept.
	timeout -s INT -k 15 "$limit" "$@" 2>>"$out/errors.txt" | tee >(grep '^{' >>"$out/results.jsonl") | grep -v '^{' |
		tee -a "$out/results.txt"
	status=${PIPESTATUS[0]}
	if [ "$status" != 0 ]; then
		say "!!! $name failed ($status)"
		tail -5 "$out/errors.txt"
		failed=1
	fi
	say "   $((SECONDS - start)) s"
}

library=()
[ "${FA3_LIBRARY:-}" ] && library=(--attention-library "$FA3_LIBRARY")
step=(-m bench.engine --model "$model" --batches $batches --context "$context" --max-model-len $((2 * context)))
serve=(-m loadtest.throughput --model "$model" --at-once "$at_once" --requests "$requests" --prompt-tokens "$prompt"
	--output-tokens "$output" --max-num-batched-tokens 8192)
say "device=$device commit=$commit $("$python" -c 'import torch; print("torch=" + torch.__version__)')"
stage served 60 "$python" "${serve[@]}" "${library[@]}"
stage served-deterministic 60 "$python" "${serve[@]}" --deterministic
stage step 45 "$python" "${step[@]}" --attention-backend "$provider"
stage transformers 75 "$python" tools/gpu/transformers_batching.py --model "$model" --requests "$requests" \
	--prompt-tokens "$prompt" --output-tokens "$output"
stage step-deterministic 40 "$python" "${step[@]}" --deterministic
stage attention 110 ${REHEARSE:+env TRITON_INTERPRET=1} "$python" -m "${kernels[@]}" "${library[@]}" --only attention
if [ "${FA3_LIBRARY:-}" ] && [ -z "${REHEARSE:-}" ]; then
	stage step-fa3 40 "$python" "${step[@]}" --attention-backend fa3 "${library[@]}"
fi
stage kernels 40 ${REHEARSE:+env TRITON_INTERPRET=1} "$python" -m "${kernels[@]}" --only layer blocks sampling
if [ -z "${REHEARSE:-}" ]; then
	stage step-fp8 40 "$python" "${step[@]}" --attention-backend triton --kv-cache-dtype fp8_e4m3
fi
echo "results in $out"
exit $failed
