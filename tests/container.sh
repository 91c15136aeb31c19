#!/bin/bash
# Builds the Dockerfile for machines without GPUs, and trains in the container as its user.
#
#     make container
#     make container CONTAINER_OPTIONS="--volume /mirror:/mirror:ro"    # further options of `buildah build`
#
# Needs root on Debian, with buildah and debootstrap: apt-get install buildah debootstrap. The base image is made by
# debootstrap, so no registry is needed, only a Debian mirror and PyPI. In the container, pip has the settings that it has
# here. Five minutes or more, and 10 GiB, in the folder WORK or, without it, in a temporary one.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
# Works without overlay file systems and user namespaces, so inside containers too.
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
storage=(--root "$WORK/storage" --runroot "$WORK/run")

for tool in buildah debootstrap; do
    command -v $tool >/dev/null || { echo "make container needs $tool: apt-get install buildah debootstrap"; exit 2; }
done

echo "The base image: Debian 12, in $WORK/debian"
if [ ! -d "$WORK/debian" ]; then
    debootstrap --variant=minbase bookworm "$WORK/unfinished" >"$WORK/debootstrap.log"
    mv "$WORK/unfinished" "$WORK/debian"
fi
base=$(buildah "${storage[@]}" from scratch)
buildah "${storage[@]}" add -q "$base" "$WORK/debian" / >/dev/null
buildah "${storage[@]}" commit -q "$base" localhost/debian:bookworm >/dev/null
buildah "${storage[@]}" rm "$base" >/dev/null

echo "The image: every step of the Dockerfile"
python3 tests/container_pip.py "$WORK" >"$WORK/pip_options"
mapfile -t pip_options <"$WORK/pip_options"
# shellcheck disable=SC2086  # several options
buildah "${storage[@]}" build --network host "${pip_options[@]}" ${CONTAINER_OPTIONS:-} --tag localhost/rankwise-cpu \
    --build-arg BASE=localhost/debian:bookworm --build-arg REQUIREMENTS=requirements-cpu.txt .

echo "A container, in which user rankwise trains"
container=$(buildah "${storage[@]}" from localhost/rankwise-cpu)
buildah "${storage[@]}" run --hostname localhost "$container" -- bash -euc '
    test "$(whoami)" = rankwise
    python examples/arithmetic.py build runs/demo
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 train_sft.py configs/demo/sft.yaml trainer.total_steps=4
    test -f runs/demo/sft/hf/model.safetensors
'
buildah "${storage[@]}" rm "$container" >/dev/null
echo "The image localhost/rankwise-cpu has been built and trains."
