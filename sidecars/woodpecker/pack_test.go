package main

import (
	"bytes"
	"testing"
)

func TestAPackComesBack(t *testing.T) {
	at := place{3, 7}
	sent := []record{{timestamp: 5, payload: []byte("one")}, {timestamp: 2, payload: nil}, {timestamp: 9, payload: bytes.Repeat([]byte{1}, 70000)}}
	top, records, err := decodePack(encodePack(11, sent), 2, at)
	if err != nil || top != 11 || len(records) != len(sent) {
		t.Fatal(top, len(records), err)
	}
	for i, each := range records {
		back, index := placeOf(2, each.id)
		if back != at || index != i+1 || each.timestamp != sent[i].timestamp || !bytes.Equal(each.payload, sent[i].payload) {
			t.Fatalf("record %d: %v at %d in %v", i, each.timestamp, index, back)
		}
	}
}

func TestWhatIsNoPackIsCorrupt(t *testing.T) {
	whole := encodePack(1, []record{{payload: []byte("x")}, {payload: []byte("y")}})
	for size := range whole {
		if _, _, err := decodePack(whole[:size], 0, place{}); err == nil {
			t.Fatalf("%d of %d bytes were taken for a pack", size, len(whole))
		}
	}
}

func TestIdsSortAsTheirPlacesDo(t *testing.T) {
	order := []uint64{place{0, 0}.id(0, 1), place{0, 0}.id(0, 2), place{0, 1}.id(0, 1), place{1, 0}.id(0, 1), place{0, 0}.id(2, 1)}
	for i := 1; i < len(order); i++ {
		if order[i-1] >= order[i] {
			t.Fatalf("id %d is not above the one before", i)
		}
	}
}

func TestATailForgetsItsOldest(t *testing.T) {
	var kept tail
	for id := uint64(1); id <= 30; id++ {
		kept.add([]record{{id: id, payload: make([]byte, 1000)}}, 10*(1000+recordOverhead))
	}
	if kept.from != 20 || kept.at(1)[0].id != 21 || len(kept.at(25)) != 6 {
		t.Fatalf("kept from %d, %d records", kept.from, len(kept.records))
	}
	kept.restart(30)
	if kept.bytes != 0 || len(kept.at(1)) != 0 {
		t.Fatalf("%d bytes are counted of nothing", kept.bytes)
	}
}
