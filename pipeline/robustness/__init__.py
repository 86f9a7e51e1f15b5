"""What the deployed model still does when a camera is lost or the weather is bad: the items of the release checklist that held-out scenes decide."""
