"""Commands about what calls may do: profiles, policy, approvals, stops, tokens, budgets, canaries."""
