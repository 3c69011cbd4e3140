"""The ways in: stdio, HTTP and SSE, and what every request passes before anything else sees it."""
