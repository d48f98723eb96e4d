package main

import (
	"encoding/binary"
	"fmt"
)

// A pack is what one entry of Woodpecker holds: many records of a channel, since each entry costs its client 100 µs.
//
//	version   1 byte, 1
//	top       8 bytes, big-endian as all numbers: the highest timestamp of the channel up to here
//	count     2 bytes
//	rows      count times: timestamp (8 bytes), length (4 bytes)
//	payloads  one behind the other
//
// `top` never falls from one pack to the next, so that the first pack with a record at or above a time is found by
// bisection.
const (
	packVersion    = 1
	packHeadBytes  = 11
	packRowBytes   = 12
	packRecords    = 1<<indexBits - 1
	packBytes      = 1 << 20 // of payloads; a larger record has a pack of its own
	indexBits      = 16
	entryBits      = 24
	segmentBits    = 24
	entriesLimit   = 1 << entryBits
	segmentsLimit  = 1 << segmentBits
	segmentShift   = entryBits + indexBits
	firstOfSegment = 1 // the index of the first record in a pack: no id is 0
)

// record is one entry of a channel, as Tidewal knows it.
type record struct {
	id        uint64
	timestamp uint64
	payload   []byte
}

// place is where a pack lies: the segment and the entry as Woodpecker numbers them.
type place struct{ segment, entry int64 }

// id numbers the record at an index of the pack. `base` is added to the segment: a channel that is created again
// continues behind the segments of the one that was dropped, and so never uses an id again.
func (p place) id(base uint64, index int) uint64 {
	return (base+uint64(p.segment))<<segmentShift | uint64(p.entry)<<indexBits | uint64(index)
}

// placeOf is the place of the pack that a record with this id lies in, and the index there.
func placeOf(base, id uint64) (place, int) {
	segment := int64(id>>segmentShift) - int64(base)
	return place{segment, int64(id >> indexBits & (entriesLimit - 1))}, int(id & packRecords)
}

func encodePack(top uint64, records []record) []byte {
	size := packHeadBytes
	for _, each := range records {
		size += packRowBytes + len(each.payload)
	}
	pack := make([]byte, 0, size)
	pack = append(pack, packVersion)
	pack = binary.BigEndian.AppendUint64(pack, top)
	pack = binary.BigEndian.AppendUint16(pack, uint16(len(records)))
	for _, each := range records {
		pack = binary.BigEndian.AppendUint64(pack, each.timestamp)
		pack = binary.BigEndian.AppendUint32(pack, uint32(len(each.payload)))
	}
	for _, each := range records {
		pack = append(pack, each.payload...)
	}
	return pack
}

// decodePack returns the highest timestamp up to here and the records, whose payloads are views of the pack.
func decodePack(pack []byte, base uint64, at place) (uint64, []record, error) {
	if len(pack) < packHeadBytes || pack[0] != packVersion {
		return 0, nil, corrupt("entry (%d, %d) is no pack of version %d", at.segment, at.entry, packVersion)
	}
	top, count := binary.BigEndian.Uint64(pack[1:]), int(binary.BigEndian.Uint16(pack[9:]))
	start := packHeadBytes + count*packRowBytes
	if start > len(pack) {
		return 0, nil, corrupt("the pack at (%d, %d) ends in its rows", at.segment, at.entry)
	}
	records := make([]record, count)
	for i := range records {
		row := pack[packHeadBytes+i*packRowBytes:]
		end := start + int(binary.BigEndian.Uint32(row[8:]))
		if end > len(pack) {
			return 0, nil, corrupt("the pack at (%d, %d) ends in its payloads", at.segment, at.entry)
		}
		id := at.id(base, firstOfSegment+i)
		records[i] = record{id, binary.BigEndian.Uint64(row), pack[start:end:end]}
		start = end
	}
	return top, records, nil
}

func corrupt(format string, values ...any) *tidewalError {
	return failure("CorruptLog", fmt.Sprintf(format, values...), nil)
}
