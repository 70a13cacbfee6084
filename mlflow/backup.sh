#!/usr/bin/env bash
# Backs up an MLflow server, registry and artifacts included, while it runs:
#
#   set -a; . mlflow/server-sqlite.env; set +a; mlflow/backup.sh FOLDER
#
# FOLDER must not exist; it appears when everything is in it. Needs python3, for PostgreSQL pg_dump (not older than the
# server), for S3 the Python package boto3.
#
# The database is copied before the artifacts. What a row points at is stored before the row is written, so all that the
# copy of the database names is in the copy of the artifacts, as long as nothing is deleted meanwhile.
set -euo pipefail
. "$(dirname "$0")/store.sh"

[[ $# -eq 1 ]] || fail "usage: backup.sh FOLDER"
settings
target=${1%/}
[[ ! -e $target ]] || fail "$target exists already"
mkdir -p "$(dirname "$target")"
draft=$(mktemp -d "$target.partial.XXXXXX")
trap 'rm -rf "$draft"' EXIT

case $MLFLOW_BACKEND_STORE_URI in
  sqlite:///*)
    "$PYTHON" - "${MLFLOW_BACKEND_STORE_URI#sqlite:///}" "$draft/database.sqlite" <<'PYTHON_END'
import sqlite3
import sys
from pathlib import Path

source, target = sys.argv[1:]
if not Path(source).is_file():
    sys.exit(f"backup.sh: {source} does not exist")
with sqlite3.connect(source) as live, sqlite3.connect(target) as copy:
    live.backup(copy)  # a consistent copy, whoever writes meanwhile
PYTHON_END
    ;;
  postgresql*)
    pg_dump --format=custom --no-owner --no-privileges --file="$draft/database.pgdump" \
      "$(libpq_uri "$MLFLOW_BACKEND_STORE_URI")"
    ;;
  *) fail "no backup of ${MLFLOW_BACKEND_STORE_URI%%:*} databases" ;;
esac
copy_tree "$MLFLOW_ARTIFACTS_DESTINATION" "$draft/artifacts"
(cd "$draft" && find . -type f ! -path ./SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
mv "$draft" "$target"
echo "$target: $(wc -l <"$target/SHA256SUMS") files"
