"""What crosses the boundaries of Tandem's parts: the InferenceModel type, launch configuration, telemetry and names."""
