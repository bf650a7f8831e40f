"""What operators see and do: status, forecasts, audits, pausing, requeueing."""
