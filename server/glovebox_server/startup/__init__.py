"""Parts of the composition root: the policy that is read, and what is prepared before the first call."""
