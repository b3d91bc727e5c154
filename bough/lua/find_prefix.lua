-- The workers that hold the longest of some prefixes, each of which begins the next.
-- KEYS[1] sorted set of leases, KEYS[2] hash of records, as in register.lua
-- ARGV[1] what the keys of prefixes begin with, the worker follows; ARGV[2] names as in note_prefixes.lua, shortest first
-- returns the number of the longest prefix that anyone holds, then the records of the workers that hold it
own(KEYS[1], 'zset')
own(KEYS[2], 'hash')
local STEP = 256 -- names asked for at once
local best, holders = 0, {}

-- The number of the longest that a worker holds, if it is no shorter than the best so far.
local function longest(key)
    local last = #ARGV[2] / 8
    while last >= math.max(best, 1) do
        local first = math.max(last - STEP + 1, best, 1)
        local names = {}
        for number = first, last do
            names[#names + 1] = string.sub(ARGV[2], number * 8 - 7, number * 8)
        end
        local scores = redis.call('ZMSCORE', key, unpack(names))
        for index = #names, 1, -1 do
            if scores[index] then
                return first + index - 1
            end
        end
        last = first - 1
    end
    return 0
end

for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms(), '+inf')) do
    local key, record = ARGV[1] .. worker, redis.call('HGET', KEYS[2], worker)
    own(key, 'zset')
    local number = record and longest(key) or 0
    if number > best then
        best, holders = number, {}
    end
    if number > 0 then
        holders[#holders + 1] = record
    end
end
return {best, unpack(holders)}
