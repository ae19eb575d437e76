"""Types that cross the boundaries of Tandem's parts: the InferenceModel resource, launch configuration, telemetry, names"""
