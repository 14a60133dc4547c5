"""An honest benchmark: the ways engines upload a batch today, each as good as it can be, beside ours."""
