#!/usr/bin/env bash
# Builds the wheel and, with docker, the images: caltune-trainer:TAG (for CPUs), caltune-pipeline:TAG,
# caltune-mlflow:TAG, and with "cuda" caltune-trainer:TAG-cuda. TORCH_INDEX_URL is the address of the CPU builds that
# PyTorch's installation page names. Usage: TORCH_INDEX_URL=... k8s/images/build.sh TAG [cuda]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tag=${1:?usage: build.sh TAG [cuda]} also=${2:-}
: "${TORCH_INDEX_URL:?set it to the address of the CPU builds that the installation page of PyTorch names}"

image() { # Dockerfile, tag, then build arguments
  local file=k8s/images/$1.Dockerfile name=$2
  shift 2
  docker build --file "$file" --tag "$name" "${@/#/--build-arg=}" .
}

rm -rf dist
python3 -m pip wheel --quiet --no-deps --wheel-dir dist .
image trainer "caltune-trainer:$tag" VARIANT=cpu "TORCH_INDEX_URL=$TORCH_INDEX_URL"
image pipeline "caltune-pipeline:$tag" "TRAINER=caltune-trainer:$tag"
image mlflow "caltune-mlflow:$tag"
if [[ $also == cuda ]]; then
  image trainer "caltune-trainer:$tag-cuda" VARIANT=cuda
fi
