-- Health of an InferenceModel for Argo CD: what kstatus reads, and Suspended where somebody asked for that.
local hs = { status = "Progressing", message = "the operator has not seen this generation yet" }
local status = obj.status
if status == nil or status.observedGeneration == nil
    or status.observedGeneration ~= obj.metadata.generation then
  return hs
end
local conditions = {}
for _, condition in ipairs(status.conditions or {}) do
  conditions[condition.type] = condition
end
local stalled, reconciling, ready = conditions.Stalled, conditions.Reconciling, conditions.Ready
if reconciling ~= nil and reconciling.status == "True" then
  hs.status, hs.message = "Progressing", reconciling.message
elseif stalled ~= nil and stalled.status == "True" then
  hs.message = stalled.message
  if stalled.reason == "Suspended" or stalled.reason == "ScaledToZero" or stalled.reason == "RolloutPaused" then
    hs.status = "Suspended"
  else
    hs.status = "Degraded"
  end
elseif ready ~= nil then
  hs.message = ready.message
  if ready.status == "True" then
    hs.status = "Healthy"
  end
end
return hs
