"""The Tandem worker: the inference engine"""
