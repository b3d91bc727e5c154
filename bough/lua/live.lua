-- Removes the leases that have run out and returns what is left, in one step.
-- KEYS[1] sorted set of leases, KEYS[2] hash of records, as in register.lua
-- returns the records of the live members
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local ended = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)
for _, member in ipairs(ended) do
    redis.call('ZREM', KEYS[1], member)
    redis.call('HDEL', KEYS[2], member)
end
return redis.call('HVALS', KEYS[2])
