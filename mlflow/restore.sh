#!/usr/bin/env bash
# Restores what backup.sh made into a new, empty place, then start the server there:
#
#   set -a; . mlflow/server-postgres-s3.env; set +a; mlflow/restore.sh FOLDER && mlflow server
#
# The settings say where to, and may differ from those of the backup in everything but the kind of database: another
# file, host, bucket. The PostgreSQL database and the bucket must exist. Nothing that is there is ever overwritten.
# A server of a newer MLflow wants `mlflow db upgrade` first.
set -euo pipefail
. "$(dirname "$0")/store.sh"

[[ $# -eq 1 ]] || fail "usage: restore.sh FOLDER"
settings
source=${1%/}
[[ -f $source/SHA256SUMS ]] || fail "$source is not a backup (it has no SHA256SUMS)"
(cd "$source" && sha256sum --quiet --strict -c SHA256SUMS) || fail "$source is damaged; nothing was restored"
is_empty "$MLFLOW_ARTIFACTS_DESTINATION" || fail "$MLFLOW_ARTIFACTS_DESTINATION is not empty"

case $MLFLOW_BACKEND_STORE_URI in
  sqlite:///*)
    database=${MLFLOW_BACKEND_STORE_URI#sqlite:///}
    [[ -f $source/database.sqlite ]] || fail "$source is not of a SQLite database"
    [[ ! -e $database ]] || fail "$database exists already"
    mkdir -p "$(dirname "$database")"
    cp "$source/database.sqlite" "$database"
    ;;
  postgresql*)
    database=$(libpq_uri "$MLFLOW_BACKEND_STORE_URI")
    [[ -f $source/database.pgdump ]] || fail "$source is not of a PostgreSQL database"
    tables=$(psql --no-psqlrc --quiet --tuples-only --no-align "$database" \
      --command "select count(*) from information_schema.tables where table_schema = 'public'")
    [[ $tables == 0 ]] || fail "the database has $tables tables already; restore into an empty one"
    pg_restore --no-owner --no-privileges --exit-on-error --single-transaction --dbname="$database" \
      "$source/database.pgdump"
    ;;
  *) fail "no restore of ${MLFLOW_BACKEND_STORE_URI%%:*} databases" ;;
esac
copy_tree "$source/artifacts" "$MLFLOW_ARTIFACTS_DESTINATION"
echo "$source: restored into ${MLFLOW_ARTIFACTS_DESTINATION}"
