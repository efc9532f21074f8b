#!/bin/sh
# Creates and upgrades Temporal's two databases. Repeating it changes nothing.
# Runs in the admin tools image; SQL_HOST, SQL_PORT, SQL_USER, SQL_PLUGIN and SQL_PASSWORD_FILE are its settings.
set -eu

SQL_PASSWORD="$(cat "$SQL_PASSWORD_FILE")"
export SQL_PASSWORD

schema() {
    database="$1" folder="$2"
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0
    temporal-sql-tool --db "$database" update-schema -d "/etc/temporal/schema/postgresql/v12/$folder/versioned"
}

schema temporal temporal
schema temporal_visibility visibility
