#!/usr/bin/env bash
# Makes the Secrets that the manifests refer to, with random values, in a namespace that exists. What is there already
# stays as it is, so it may be run again. Usage: k8s/secrets.sh [namespace]
set -euo pipefail
namespace=${1:-caltune}

random() { head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n'; }

make() { # name, then the arguments of kubectl create secret generic; values come on file descriptors, not in arguments
  local name=$1
  shift
  if kubectl -n "$namespace" get secret "$name" >/dev/null 2>&1; then
    echo "secret $name is there already"
  else
    kubectl -n "$namespace" create secret generic "$name" "$@"
  fi
}

access=$(random) secret=$(random)
identities=$(printf '{"identities":[{"name":"mlflow","actions":["Admin"],"credentials":[%s]}]}' \
  "{\"accessKey\":\"$access\",\"secretKey\":\"$secret\"}")

make caltune-ray-token --from-file=auth_token=<(random)
make caltune-postgres --from-file=password=<(random)
make caltune-s3 --from-file=access-key=<(printf %s "$access") --from-file=secret-key=<(printf %s "$secret") \
  --from-file=s3.json=<(printf %s "$identities")
# For gated models of the hub: HF_TOKEN=... k8s/secrets.sh
if [[ -n ${HF_TOKEN:-} ]]; then
  make caltune-hub --from-file=HF_TOKEN=<(printf %s "$HF_TOKEN")
fi
