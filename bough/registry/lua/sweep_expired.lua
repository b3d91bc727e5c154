-- Removes expired leases atomically. The prefixes of their workers have expired with them.
-- KEYS[1] sorted set of leases, KEYS[2] hash of records, as in register.lua
-- returns the number of removed workers
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms())
local num_removed = 0
for _, worker in ipairs(redis.call('HKEYS', KEYS[2])) do
    if not redis.call('ZSCORE', KEYS[1], worker) then
        redis.call('HDEL', KEYS[2], worker)
        num_removed = num_removed + 1
    end
end
return num_removed
