; A small household for the quirks of the engine: two cabinets share a location with a countertop, on which lie a mug,
; an apple (cool already) and a knife. The word in capitals at the end stands for the goal.
(define (problem two_cabinets)
(:domain alfred)
(:objects
    agent1 - agent
    AppleType ButterKnifeType DeskLampType KnifeType MugType - otype
    CabinetType CounterTopType DeskType FridgeType MicrowaveType SinkBasinType - rtype
    Mug_bar_1 Mug_bar_2 Apple_bar_1 Knife_bar_1 DeskLamp_bar_1 - object
    CounterTop_bar_1 Cabinet_bar_1 Cabinet_bar_2 Microwave_bar_1 Sink_bar_1_bar_SinkBasin Desk_bar_1 - receptacle
    loc_a loc_b loc_c loc_d loc_start - location)
(:init
    (receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc_a)
    (receptacleType Cabinet_bar_1 CabinetType) (receptacleAtLocation Cabinet_bar_1 loc_a) (openable Cabinet_bar_1)
    (receptacleType Cabinet_bar_2 CabinetType) (receptacleAtLocation Cabinet_bar_2 loc_a) (openable Cabinet_bar_2)
    (receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_b)
    (openable Microwave_bar_1)
    (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_c)
    (receptacleType Desk_bar_1 DeskType) (receptacleAtLocation Desk_bar_1 loc_d)
    (canContain CounterTopType MugType) (canContain CounterTopType AppleType) (canContain CounterTopType KnifeType)
    (canContain CabinetType MugType) (canContain DeskType MugType)
    (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1) (isReceptacleObject Mug_bar_1)
    (objectType Mug_bar_2 MugType) (pickupable Mug_bar_2) (isReceptacleObject Mug_bar_2)
    (objectType Apple_bar_1 AppleType) (pickupable Apple_bar_1) (cleanable Apple_bar_1) (heatable Apple_bar_1)
    (sliceable Apple_bar_1) (isCool Apple_bar_1)
    (objectType Knife_bar_1 KnifeType) (pickupable Knife_bar_1)
    (objectType DeskLamp_bar_1 DeskLampType) (toggleable DeskLamp_bar_1)
    (inReceptacle Mug_bar_1 CounterTop_bar_1) (objectAtLocation Mug_bar_1 loc_a)
    (inReceptacle Mug_bar_2 Cabinet_bar_1) (objectAtLocation Mug_bar_2 loc_a)
    (inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc_a)
    (inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc_a)
    (inReceptacle DeskLamp_bar_1 Desk_bar_1) (objectAtLocation DeskLamp_bar_1 loc_d)
    (atLocation agent1 loc_start))
(:goal (and GOAL)))
