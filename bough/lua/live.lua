-- The workers whose lease runs.
-- KEYS[1] sorted set of leases, KEYS[2] hash of records, as in register.lua
-- returns their records
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
local records = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms(), '+inf')) do
    local record = redis.call('HGET', KEYS[2], worker)
    if record then
        records[#records + 1] = record
    end
end
return records
