"""OAuth 2.1: callers with an access token of an identity provider, which is asked only for its keys."""
