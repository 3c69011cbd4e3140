"""Parts of the composition root: the policy that is read, what is prepared before the first call."""
