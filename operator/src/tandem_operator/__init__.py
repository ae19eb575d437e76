"""The Tandem operator: turns InferenceModel objects into prefill and decode StatefulSets and a gateway"""
