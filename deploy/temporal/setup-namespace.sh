#!/bin/sh
# Creates the namespace, or sets its retention, and registers the search attributes. Repeating it changes nothing.
# Needs the `temporal` CLI; TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and RETENTION_DAYS are its settings.
set -eu

retention="${RETENTION_DAYS}d"

tries=0
until temporal operator cluster health >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ]; then
        echo "no Temporal server at $TEMPORAL_ADDRESS" >&2
        exit 1
    fi
    sleep 1
done

# `update` comes first: `create` refuses a namespace that exists.
temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention "$retention" >/dev/null 2>&1 ||
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$retention"

# A fresh namespace takes some seconds until every part of the server knows it.
tries=0
until temporal operator search-attribute create \
    --name TaskStatus --type Keyword \
    --name UserId --type Keyword \
    --name ErrorCode --type Keyword \
    --name CallbackStatus --type Keyword \
    --name Model --type Keyword \
    --name BatchId --type Keyword \
    --name WorkerId --type Keyword \
    --name FinishedAt --type Datetime; do
    tries=$((tries + 1))
    if [ "$tries" -ge 30 ]; then
        echo "the search attributes of namespace $TEMPORAL_NAMESPACE cannot be registered" >&2
        exit 1
    fi
    sleep 1
done
echo "namespace $TEMPORAL_NAMESPACE: retention $retention, search attributes registered"
