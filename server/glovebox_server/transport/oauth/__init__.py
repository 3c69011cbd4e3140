"""OAuth 2.1: callers that come with an access token of an identity provider, which is asked for its keys alone."""
