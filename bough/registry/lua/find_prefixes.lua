-- Counts the leading blocks of a text that each worker has cached.
-- KEYS[1] sorted set of leases, as in register.lua; KEYS[2...] prefixes of each worker, as in note_prefixes.lua
-- ARGV[1] names as in note_prefixes.lua, shortest prefix first; ARGV[2...] the workers, in the order of their keys
-- returns a number for each worker; 0 for one without a lease
own(KEYS[1], 'zset')
local now = now_ms()
local answer = {}
for index = 2, #KEYS do
    own(KEYS[index], 'zset')
    local ends = redis.call('ZSCORE', KEYS[1], ARGV[index])
    -- A worker with a block also has all before it, as later ones are dropped first: bisect for the last one.
    local held, beyond = 0, ends and tonumber(ends) > now and #ARGV[1] / 8 + 1 or 1
    while beyond - held > 1 do
        local middle = math.floor((held + beyond) / 2)
        if redis.call('ZSCORE', KEYS[index], string.sub(ARGV[1], middle * 8 - 7, middle * 8)) then
            held = middle
        else
            beyond = middle
        end
    end
    answer[#answer + 1] = held
end
return answer
