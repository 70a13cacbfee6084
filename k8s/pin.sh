#!/usr/bin/env bash
# Writes image digests into an overlay. Each argument is LOGICAL-NAME=REPOSITORY@sha256:DIGEST; the overlay's entry of
# that name has to exist. Usage: k8s/pin.sh k8s/overlays/gpu-prod caltune-trainer=registry.example.com/x@sha256:...
set -euo pipefail
file=$1/kustomization.yaml
shift
for pair in "$@"; do
  if [[ ! $pair =~ ^([^=]+)=([^=@]+)@(sha256:[0-9a-f]{64})$ ]]; then
    echo "pin.sh: '$pair' is not NAME=REPOSITORY@sha256:<64 hex digits>" >&2
    exit 2
  fi
  name=${BASH_REMATCH[1]} repository=${BASH_REMATCH[2]} digest=${BASH_REMATCH[3]}
  if ! grep -qxF "  - name: $name" "$file"; then
    echo "pin.sh: $file has no image '$name'" >&2
    exit 2
  fi
  awk -v name="  - name: $name" -v repository="$repository" -v digest="$digest" '
    /^  - / || /^[^ ]/ { here = ($0 == name) }
    here && /^    newName: / { $0 = "    newName: " repository }
    here && /^    digest: / { $0 = "    digest: " digest }
    { print }
  ' "$file" >"$file.partial"
  mv "$file.partial" "$file"
done
