"""Process composition: settings, connection, codec, keys, registry and the programs that run workers."""
