"""The InferenceModel resource, `inferencemodels.tandem.dev/v1alpha1`.

These classes are the one definition: the CRD's schema, the operator's parser and the reference in `docs/` come from
them. Only what works is in here; a field that is not here is refused by the API server's strict validation.
"""
