# Source this file on a GPU host, in the repository's root: . tools/gpu/host.sh
# Unpacks the files from `make gpu-carry` next to the host's own Python packages, and sets FA3_LIBRARY to
# FlashAttention-3's library. Copies the carried C++ extensions into place, or compiles them if there are none, which
# takes minutes. Installs nothing.
set -euo pipefail
SITE=${TMPDIR:-/tmp}/looseleaf-site
python3 - "$SITE" <<'PYTHON'
import glob, lzma, os, shutil, sys, zipfile

site = sys.argv[1]
os.makedirs(site, exist_ok=True)
for wheel in glob.glob(".carry/wheels/*.whl"):
    mark = os.path.join(site, "." + os.path.basename(wheel))
    if not os.path.exists(mark):
        zipfile.ZipFile(wheel).extractall(site)
        open(mark, "w").close()
for program in glob.glob(f"{site}/**/redis-server", recursive=True):
    os.chmod(program, 0o755)  # zipfile does not keep file modes
if os.path.exists(".carry/fa3.so.xz") and not os.path.exists(f"{site}/fa3.so"):
    with lzma.open(".carry/fa3.so.xz") as packed, open(f"{site}/fa3.part", "wb") as out:
        shutil.copyfileobj(packed, out, 1 << 22)
    os.rename(f"{site}/fa3.part", f"{site}/fa3.so")
PYTHON
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ -e "$SITE/fa3.so" ]; then export FA3_LIBRARY="$SITE/fa3.so"; fi
if [ -d .carry/extensions ]; then
	cp -r .carry/extensions/. .
else
	python3 setup.py -q build_ext --inplace --parallel "$(nproc)"
fi
