# Functions that backup.sh and restore.sh share. A place of artifacts is a folder, file:///folder or s3://bucket/prefix;
# a database is sqlite:////path or postgresql+driver://user@host:port/name.
PYTHON=${PYTHON:-python3}

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

settings() {
  [[ -n ${MLFLOW_BACKEND_STORE_URI:-} && -n ${MLFLOW_ARTIFACTS_DESTINATION:-} ]] ||
    fail "set MLFLOW_BACKEND_STORE_URI and MLFLOW_ARTIFACTS_DESTINATION as for the server, e.g. from server-sqlite.env"
}

# The URI as PostgreSQL's own programs read it: SQLAlchemy's name of the driver goes.
libpq_uri() {
  sed -E 's|^postgresql\+[a-z0-9]+:|postgresql:|' <<<"$1"
}

# copy_tree FROM TO: every file below FROM, under the same name below TO. One of the two may be in S3.
copy_tree() {
  if [[ $1 != s3://* && $2 != s3://* ]]; then
    mkdir -p "${2#file://}"
    [[ ! -d ${1#file://} ]] || cp -a "${1#file://}/." "${2#file://}/"
    return
  fi
  "$PYTHON" - "$1" "$2" <<'PYTHON_END'
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import boto3

source, target = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL"))
there = urlsplit(source if source.startswith("s3://") else target)
bucket, prefix = there.netloc, there.path.strip("/")
stem = f"{prefix}/" if prefix else ""
if source.startswith("s3://"):
    root = Path(target.removeprefix("file://"))
    root.mkdir(parents=True, exist_ok=True)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=stem):
        for item in page.get("Contents", []):
            path = root / item["Key"].removeprefix(stem)
            path.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(path))
else:
    root = Path(source.removeprefix("file://"))
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        s3.upload_file(str(path), bucket, stem + path.relative_to(root).as_posix())
PYTHON_END
}

# is_empty PLACE: whether it holds no artifact.
is_empty() {
  if [[ $1 != s3://* ]]; then
    [[ ! -d ${1#file://} || -z $(ls -A "${1#file://}") ]]
    return
  fi
  "$PYTHON" - "$1" <<'PYTHON_END'
import os
import sys
from urllib.parse import urlsplit

import boto3

place = urlsplit(sys.argv[1])
prefix = place.path.strip("/")
s3 = boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL"))
found = s3.list_objects_v2(Bucket=place.netloc, Prefix=f"{prefix}/" if prefix else "", MaxKeys=1)
sys.exit(1 if found["KeyCount"] else 0)
PYTHON_END
}
