#!/bin/sh
# Makes the secret files that docker-compose.temporal.yml mounts. What exists is kept.
#
#     deploy/make-secrets.sh [FOLDER]        default: deploy/secrets
#
# REELGATE_S3_PUBLIC_URL is the object store as clients reach it (default http://localhost:8333): links to clips
# lead there. Only the owner can enter the folder; the files in it can be read by all, since containers read them
# under user ids of their own.
set -eu

folder="${1:-$(dirname "$0")/secrets}"
public_url="${REELGATE_S3_PUBLIC_URL:-http://localhost:8333}"

mkdir -p "$folder"
chmod 700 "$folder"
umask 077

hex() { od -An -N "$1" -t x1 /dev/urandom | tr -d ' \n'; }

# Takes the content from standard input; the file appears whole or not at all.
make() {
    cat >"$folder/.$1.new"
    chmod 444 "$folder/.$1.new"
    mv "$folder/.$1.new" "$folder/$1"
    echo "made $folder/$1"
}

[ -e "$folder/.gitignore" ] || echo '*' >"$folder/.gitignore"
[ -e "$folder/postgres_password" ] || hex 24 | make postgres_password
[ -e "$folder/codec.keys" ] || printf 'k%s:%s\n' "$(hex 3)" "$(head -c 32 /dev/urandom | base64)" | make codec.keys
[ -e "$folder/link.secret" ] || hex 32 | make link.secret

# One pair of credentials in the three shapes that the store, the bucket job and Reelgate read; made together.
if [ ! -e "$folder/store_options.json" ]; then
    id="$(hex 10)" secret="$(hex 24)"
    make s3_identities.json <<END
{"identities": [{"name": "reelgate", "credentials": [{"accessKey": "$id", "secretKey": "$secret"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
END
    make rclone.conf <<END
[store]
type = s3
provider = Other
endpoint = http://s3:8333
access_key_id = $id
secret_access_key = $secret
END
    make store_options.json <<END
{"endpoint": "http://s3:8333", "public_endpoint": "$public_url", "allow_http": "true",
 "access_key_id": "$id", "secret_access_key": "$secret"}
END
fi
