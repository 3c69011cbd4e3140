"""Programs' own TLS that ends inside their sandbox: the certificates for it."""
