"""The conformance suite of drivers: attacks as data, and a small runner. Shipped, so that any host can prove itself.

``cases/*.toml`` are the cases, ``case`` reads them, ``host`` plants what must not be reached, ``trial`` runs a case in
a sandbox and judges it, ``control`` runs the same program without a sandbox.
"""
