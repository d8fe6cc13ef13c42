"""prototype"""
from __future__ import annotations
import heapq, math
from collections import OrderedDict
from atom.model_engine.eviction import Ending, EvictionPolicy, PoolView
from atom.model_engine.eviction_forest import Forest, Segment
from atom.model_engine.placement import RungKind
from atom.model_engine.state_cache import Checkpoint

class Record:
    __slots__=("prompt","answer_key","answer_end","released","ending","gap","turns","key","bucket","cls","ends")

class ByValue(EvictionPolicy):
    def __init__(self):
        self._superseded=OrderedDict(); self._guesses=OrderedDict(); self._anchors=OrderedDict()
        self._reads={}
        self._heap=[]; self._count=0
        self._worthless=[]
        self._open={}; self._ends={}
        self._records=OrderedDict()
        self.echo=[0.5,1.0]
        pass
    def attach(self,pool):
        self.pool=pool; self.forest=Forest(pool,self._rank)
    @property
    def num_blocks(self): return self.forest.num_blocks
    @property
    def num_images(self): return len(self._superseded)+len(self._guesses)+len(self._anchors)
    # learning
    def admitted(self,keys,matched,cached):
        if not keys: return
        rec=None
        records=self._records
        for i in range(len(keys)-1,-1,-1):
            if keys[i] in records:
                rec=records[keys[i]]; break
        self._open[keys[-1]]=(len(keys),rec)
        if rec is not None:
            for k in rec.ends: self._ends.pop(k,None)
        for k in keys[-2:]: self._ends[k]=None
        if rec is not None and rec.released is not None:
            if rec.answer_end>rec.prompt:
                hit=len(keys)>=rec.answer_end and keys[rec.answer_end-1]==rec.answer_key
                self.echo[0]=self.echo[0]*0.99+hit; self.echo[1]=self.echo[1]*.99+1
            self.returned(rec,self.pool.now()-rec.released)
    def returned(self,rec,gap): pass
    def add_block(self,block): self.add_blocks((block,),None)
    def remove_block(self,block): self.remove_blocks((block,))
    def remove_blocks(self,blocks): self.forest.remove(blocks)
    def add_blocks(self,blocks,ending):
        key_of=self.pool.key_of
        opened=None
        for b in blocks:
            k=key_of(b)
            if k in self._open:
                opened=self._open.pop(k); break
        seg=self.forest.add(blocks)
        seg.ending=ending
        if opened is not None:
            seg.prompt=opened[0]
            rec=Record(); rec.prompt=opened[0]; rec.answer_end=seg.end; rec.answer_key=key_of(blocks[0]); rec.released=self.pool.now(); rec.ending=ending
            prev=opened[1]
            rec.turns=prev.turns+1 if prev else 0
            rec.gap=prev.gap if prev else None
            rec.key=k
            bs=seg.blocks; pi=opened[0]-seg.base
            rec.ends=[k]
            if pi-2>=0: rec.ends.append(key_of(bs[pi-2]))
            self._records[k]=rec; self._records.move_to_end(k)
            if len(self._records)>20000: self._records.popitem(last=False)
            seg.path=rec
            self.opened(rec)
        self._rank(seg)
    def opened(self,rec): pass
    # images
    def _class_of(self,image):
        if image.superseded: return self._superseded
        return self._guesses if image.is_guess else self._anchors
    def add_image(self,image):
        self._class_of(image)[image]=None
        self.forest.add_image(image)
    def remove_image(self,image):
        del self._class_of(image)[image]
        self.forest.remove_image(image)
    # rank
    def _rank(self,seg):
        seg.version+=1
        self._count+=1
        if not seg.is_leaf: return
        self.place(seg)
    def unit(self,seg):
        """(gain, pages) of the unit at the end; None worthless"""
        ppi=self.pool.pages_per_image
        end=seg.end
        if seg.is_lost: return None
        floor=max(seg.base, seg.joints[-1] if seg.joints else 0)
        if not ppi: return (end-floor, end-floor)
        if not seg.images or seg.images[-1][0]<end: return None
        lower=seg.base
        w=1.0
        if len(seg.images)>1:
            lower=max(lower,seg.images[-2][0])
            if seg.images[-2][0]==seg.prompt or seg.images[-2][0]==seg.prompt-1:
                w=self.echo[0]/self.echo[1] if end>seg.prompt else 1.0
        return (w*(end-lower), end-max(lower,floor)+ppi)
    def place(self,seg):
        u=self.unit(seg)
        if u is None: heapq.heappush(self._worthless,(seg.released,self._count,seg,seg.version))
        else: self.push(seg,*u)
    def push(self,seg,gain,pages):
        heapq.heappush(self._heap,(self.score(seg,gain,pages),self._count,seg,seg.version))
    def score(self,seg,gain,pages): return seg.released
    def top(self,heap):
        while heap:
            e=heap[0]
            if e[2].version==e[3]: return e
            heapq.heappop(heap)
        return None
    def protected(self,image):
        """prompt end of the latest request of its path"""
        return image.key in self._ends
    def weak(self):
        for s in (self._superseded,self._guesses):
            for im in s:
                if s is self._superseded and self.protected(im): continue
                del s[im]; self.forest.remove_image(im); return im
        return None
    def pop(self):
        e=self.top(self._worthless)
        if e: return self.forest.pop_last(e[2])
        im=self.weak()
        if im is not None: return im
        e=self.best()
        if e: return self.forest.pop_last(e)
        for s in (self._superseded,self._guesses,self._anchors):
            if s:
                im=s.popitem(last=False)[0]; self.forest.remove_image(im); return im
        raise KeyError("nothing")
    def best(self):
        e=self.top(self._heap)
        return e[2] if e else None
    def blocks(self):
        for s in list(self.forest): yield from list(s.blocks)
    def images(self):
        yield from self._superseded; yield from self._guesses; yield from self._anchors

class Clair(ByValue):
    def __init__(self,future): ByValue.__init__(self); self.future=future
    def score(self,seg,gain,pages):
        # next use of the deepest image's key
        key=self.pool.key_of(seg.blocks[-1])
        return -self.future.next_use(key)
