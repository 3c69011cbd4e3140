"""The certificate authorities this machine trusts, as text for a sandbox. The gate itself uses the same store."""

import ssl
from functools import cache
from pathlib import Path


@cache
def authorities() -> bytes:
    """PEM of every certificate in the system's trust store; empty where there is none.

    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` choose another store, here as for the gate.
    """
    context = ssl.create_default_context()
    directory = ssl.get_default_verify_paths().capath
    if directory is not None:
        # OpenSSL reads such a directory only when it looks for one name; its files are named <hash>.<number>.
        for path in sorted(Path(directory).glob("*.[0-9]")):
            try:
                context.load_verify_locations(path)
            except (ssl.SSLError, OSError):
                continue  # not a certificate, or one that cannot be read: not trusted here either
    return "".join(ssl.DER_cert_to_PEM_cert(der) for der in context.get_ca_certs(binary_form=True)).encode("ascii")
